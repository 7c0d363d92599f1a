"""The TrainingJob resource: its types, and the CustomResourceDefinition made from them."""
