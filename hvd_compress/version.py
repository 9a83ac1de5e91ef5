"""The package's version; ranks compare it before they exchange anything."""

__version__ = "0.1.0"
