"""Which version serves: gate, canary, promotion and rollback, as decisions in the bucket."""
