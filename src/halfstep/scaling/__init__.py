"""Loss scaling: the scale, the drop-in GradScaler, and other libraries' scaler states."""
