"""`python -m tao.cli` runs `tao` with a chosen interpreter."""

from tao.cli import main

main()
