"""Every state that a crash could leave of one save, and what recovery makes of each.

`record` runs a save, all ranks of it, and keeps its file operations; `explore` decides what
recovery returns for every state that a power loss at any moment could leave; `table` prints a
counterexample. See docs/crash-states.md.
"""
