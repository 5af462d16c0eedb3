"""The calculator: what training costs, on the command line and as a page."""
