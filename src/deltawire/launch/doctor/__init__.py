"""Examines a machine, its packages and a store, and says how to fix what is missing."""

from deltawire.launch.doctor.findings import Examination, Finding
from deltawire.launch.doctor.machine import examine_machine
from deltawire.launch.doctor.packages import examine_packages
from deltawire.launch.doctor.stores import examine_conformance, examine_store

__all__ = [
    "Examination",
    "Finding",
    "examine_conformance",
    "examine_machine",
    "examine_packages",
    "examine_store",
]
