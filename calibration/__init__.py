"""From measurements to a cost profile that can be believed. Nothing in here yet.

This package will hold the loop that keeps the simulator honest: choose what to measure, measure it on a device, fit
the cost model, and judge the fit on points it has not seen. A profile will carry where it comes from (machine, driver,
versions, date, command), its error on held-out points, and the range beyond which it extrapolates.
"""
