"""The web studio: what its tabs do (plain functions), and the page that shows it (`app`)."""
