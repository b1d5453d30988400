"""What is asked: self-contained problems that every solver, checker and plan file shares."""
