"""The focal loss of detectors: as in apex, ``from apex.contrib.focal_loss import focal_loss`` imports the module."""

from fabricamp.apex.contrib.focal_loss import focal_loss as focal_loss
