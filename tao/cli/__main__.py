"""`python -m tao.cli`: the same as `tao`, for whoever starts servers with an interpreter of their own choice."""

from tao.cli import main

main()
