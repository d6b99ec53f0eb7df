"""Records of the ops that tensor graphs know."""
