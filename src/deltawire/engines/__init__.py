"""How a delta lands, verified and in place, in weights that are being served."""
