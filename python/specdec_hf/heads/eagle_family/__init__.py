"""What heads with one decoder layer over pairs share: module, files, draft step and drafters."""
