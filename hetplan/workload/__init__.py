"""What is asked of the model: request classes, promises, and traces of real traffic."""
