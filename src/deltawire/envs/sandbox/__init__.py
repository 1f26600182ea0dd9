"""Commands of strangers, run where they see nothing, reach nothing and leave nothing behind.

`deltawire.envs.sandbox.box` is what others use. The other modules run in the launcher, a process of
its own that imports the standard library only.
"""
