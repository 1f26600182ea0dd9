"""In front of engines that serve: the hosted providers' hot-load contract over a run's versions."""
