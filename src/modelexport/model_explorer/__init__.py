"""Extension for Model Explorer: `model-explorer --extensions=modelexport.model_explorer`."""
