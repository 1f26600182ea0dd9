"""Tools of servers that speak MCP (the Model Context Protocol), as tools of an environment."""
