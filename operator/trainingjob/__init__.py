"""The operator: the TrainingJob resource, its planning, and what carries it out."""
