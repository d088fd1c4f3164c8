"""The measuring program; the only part of calibration that imports torch."""
