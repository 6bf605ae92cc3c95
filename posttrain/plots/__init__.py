"""Charts of runs and of data: in the terminal, as SVG and PNG, and as one HTML page."""
