"""Around the user's own training loop: the stepper and what belongs to it, the average of the weights included."""
