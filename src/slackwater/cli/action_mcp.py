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
    async def listed(
        context: ServerRequestContext[dict[str, object]],
        params: types.PaginatedRequestParams | None,
    ) -> types.ListToolsResult:
        del context, params
        functions = [one["function"] for one in tools.definitions()]
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=one["name"], description=one["description"], input_schema=one["parameters"]
                )
                for one in functions
            ]
        )

    async def called(
        context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        del context
        if params.name not in {one["function"]["name"] for one in tools.definitions()}:
            raise MCPError(_NO_TOOL, f"there is no tool {params.name!r}")
        try:
            went_well, said = await tools.call(params.name, params.arguments or {})
        except SlackwaterError as error:
            went_well, said = False, f"error: {error}"
        content = types.TextContent(type="text", text=said)
        return types.CallToolResult(content=[content], is_error=not went_well)

    return Server(
        "slackwater", version=version("slackwater"), on_list_tools=listed, on_call_tool=called
    )


async def serve(url: str, key: str, job: str, memory_mib: int) -> None:
    """Until the standard input ends."""
    async with (
        ActionClient(url, key, job=job) as actions,
        actions.environment(memory_mib=memory_mib) as place,
        stdio.stdio_server() as (reads, writes),
    ):
        server = tool_server(Tools(place, limits={"memory_mib": memory_mib}))
        await server.run(reads, writes, server.create_initialization_options())
