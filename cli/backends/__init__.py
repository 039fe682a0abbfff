"""What programs talk to: one service that owns the model, and the protocols in front of it."""
