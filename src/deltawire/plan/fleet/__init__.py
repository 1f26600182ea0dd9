"""Plans how weights reach a fleet: time, bytes and money of each hop, staleness, memory."""
