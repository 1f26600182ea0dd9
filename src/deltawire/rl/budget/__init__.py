"""Controller: moves a run's thinking budget by accuracy gained per token."""
