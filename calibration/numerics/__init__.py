"""What fits are made of: robust non-negative least squares, fields of ratios, phases, splits, resampling."""
