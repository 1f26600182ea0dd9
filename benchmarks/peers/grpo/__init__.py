"""The same small GRPO job in TRL and in deltawire, for ``deltawire bench peers``."""
