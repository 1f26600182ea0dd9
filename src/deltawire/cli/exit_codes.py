"""Exit codes beyond those of errors (`deltawire.errors`)."""

INTERRUPTED = 130
NOT_READ = 1
"""The reader of standard output closed it, such as ``| head``; rich uses this code too."""
IO_FAILED = 74
DAMAGED = 3
"""``fsck`` found a version that cannot be read."""
EXCEEDED = 3
"""``parity`` measured more than ``--limit``."""
DIFFERENT = 5
"""``replay`` computed bits that differ from the run's, or ``attest`` found some; also
`launch.session.AuditError`."""
FLAGGED = 6
"""``probes`` shows a reward that came apart from a probe."""
UNFIT = 8
"""``doctor`` found a problem."""
UNDECIDED = 11
"""``bisect`` found no version that is certain enough, ``compare`` no candidate that is better,
``attest`` no tensor that differs but some that it cannot read."""
NOT_ALIVE = 12
"""``alive``: the process is silent or makes no progress."""
HARMED = 13
"""``simulate`` promoted a planted version, or its users were less satisfied at the end."""
UNKNOWN_USER = 9
"""``forget`` and ``live export`` found nothing under the name that they were given."""
FORKED = 14
"""``forget``: forks of the run hold weights that were trained on the user."""
