"""Several hosts on one machine: network namespaces joined by a switch, whose links can fail.

`layout` says which host has which address, `switch` is the process that holds the namespaces and
does what goes wrong, `process` starts it, `control` is how it is spoken to, `evidence` what it saw.
"""
