"""Simulates users of a gateway, with a known optimum: see `population` and `driver`.

Run ``python -m deltawire.testing.users --help`` to send simulated users to a gateway.
"""

from deltawire.testing.users.population import (
    ANSWERS,
    KINDS,
    STYLES,
    Population,
    Reaction,
    SimulatedRequest,
    SimulatedUser,
    UserSettings,
)

__all__ = [
    "ANSWERS",
    "KINDS",
    "STYLES",
    "Population",
    "Reaction",
    "SimulatedRequest",
    "SimulatedUser",
    "UserSettings",
]
