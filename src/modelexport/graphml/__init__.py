"""Write a model as GraphML for yEd, and read it back."""
