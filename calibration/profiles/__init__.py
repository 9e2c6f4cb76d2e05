"""The profiles that come with kvtwin, one JSON file each. `python -m experiments.build_profiles` writes them."""
