"""The lab: train variants under equal conditions, and say with intervals what each costs and gains."""
