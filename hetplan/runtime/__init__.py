"""What runs beside or inside the engines."""
