"""mcp: its own client lists and calls the tools of `slackwater action mcp`."""

import asyncio
import sys

from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

program, state = sys.argv[1:]


async def main() -> None:
    server = StdioServerParameters(command=program, args=["action", "mcp", "--state", state])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = [tool.name for tool in (await session.list_tools()).tools]
        assert "shell" in names, names
        found = await session.call_tool("shell", {"command": "echo high; exit 3"})
        text = "".join(part.text for part in found.content)
        assert "high" in text, found
        wrong = await session.call_tool("shell", {"unknown": "x"})
        assert "takes exactly command" in wrong.content[0].text, wrong
        print(f"mcp: {len(names)} tools listed, called, and refused by name")


asyncio.run(main())
