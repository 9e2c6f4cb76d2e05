"""A recorded run against its simulation: errors, intervals, verdict and page; what a profile does not know."""
