"""Learns from live users: gateway, receipts, feedback, training data, erasure, canaries."""
