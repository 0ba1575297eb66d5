"""The computed tables and figures of the BandMF paper, regenerated and compared with its digits.

One module computes one table or figure; `published` holds the digits of the paper and `report` the
comparison. `python -m tools.reproduce_paper` runs them.
"""
