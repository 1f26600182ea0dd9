"""The rollout worker: episodes, agent harnesses, the policy it samples from, and uploads."""
