"""Flow control: credits, admission, staleness and the rollout buffer."""
