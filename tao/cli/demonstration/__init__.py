"""`tao demo`: the system shown at work, chapter by chapter, to somebody who has not read the paper.

Every figure that is printed was measured in this run, and every claim is checked before it is printed: what turns out
otherwise ends the demonstration with `DemonstrationFailed`. So it is a smoke test of the whole as well.

`stage` starts a private cluster; `checkin_page`, `page_graph`, `read_back`, `two_tiers` and `cache_check` are what is
shown on it; `narration` says how things look, `figures` what is left of them for scripts.
"""
