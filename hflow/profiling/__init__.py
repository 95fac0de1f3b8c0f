"""`hflow profile`: measures the hardware at hand, and writes what programs reach on it as a calibration.

`measure` times kernels, collectives and decode steps with torch, `fit` turns seconds into the figures of a
`Calibration`, and `calibrate` puts both together.
"""
