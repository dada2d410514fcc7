"""`slackwater action mcp`: an MCP server on stdio; one session has one environment."""

from importlib.metadata import version

from mcp import types
from mcp.server import Server, ServerRequestContext, stdio
from mcp.shared.exceptions import MCPError

from slackwater.model.errors import SlackwaterError
from slackwater.rl.actions import ActionClient
from slackwater.rl.tools import Tools

_NO_TOOL = -32602  # JSON-RPC: invalid parameters


def tool_server(tools: Tools) -> Server[dict[str, object]]:
    async def list_tools(
        context: ServerRequestContext[dict[str, object]],
        params: types.PaginatedRequestParams | None,
    ) -> types.ListToolsResult:
        del context, params
        functions = [tool["function"] for tool in tools.definitions()]
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool["name"],
                    description=tool["description"],
                    input_schema=tool["parameters"],
                )
                for tool in functions
            ]
        )

    async def call_tool(
        context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        del context
        if params.name not in {tool["function"]["name"] for tool in tools.definitions()}:
            raise MCPError(_NO_TOOL, f"there is no tool {params.name!r}")
        try:
            succeeded, output = await tools.call(params.name, params.arguments or {})
        except SlackwaterError as error:
            succeeded, output = False, f"error: {error}"
        content = types.TextContent(type="text", text=output)
        return types.CallToolResult(content=[content], is_error=not succeeded)

    return Server(
        "slackwater",
        version=version("slackwater"),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve(url: str, key: str, job: str, memory_mib: int) -> None:
    """Serve until standard input ends."""
    async with (
        ActionClient(url, key, job=job) as actions,
        actions.environment(memory_mib=memory_mib) as environment,
        stdio.stdio_server() as (reads, writes),
    ):
        server = tool_server(Tools(environment, limits={"memory_mib": memory_mib}))
        await server.run(reads, writes, server.create_initialization_options())
