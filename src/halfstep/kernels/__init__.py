"""The only arithmetic over parameters and gradients."""
