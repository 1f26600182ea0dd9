"""What lies in a bucket: keys, and the typed objects behind them, each with its limits."""
