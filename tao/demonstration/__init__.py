"""The demonstration of `tao demo`: shows the system at work, chapter by chapter, to readers who do not know the paper.

Every figure that is printed is measured in the same run, and every claim is checked before it is printed: a failed
check ends the demonstration with `DemonstrationFailed`. So it is a smoke test of the whole system as well.

`chapters` says what is shown, `narration` how; the chapters work on private clusters, which `stage` starts.
"""
