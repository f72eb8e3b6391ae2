"""eagle3lab: a lab for EAGLE-3 drafters. Capture, train, inspect and measure, with evidence at every step.

Importing the package loads nothing heavy: no torch, no transformers (`python -X importtime -c "import eagle3lab"`).
"""

__version__ = "0.1.0"
