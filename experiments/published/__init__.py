"""What others measured and published, against the embedded profiles: runs, rows, and the scenarios behind them."""
