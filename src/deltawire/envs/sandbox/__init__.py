"""Runs untrusted commands and expressions, isolated by the kernel's namespaces.

Use `deltawire.envs.sandbox.box` for commands and `deltawire.envs.sandbox.evaluator` for
expressions. The other modules run in the launcher, a separate process that imports the standard
library only.
"""
