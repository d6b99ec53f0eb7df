// Starts `tilewright lsp` for ZynML programs.
const { workspace, window } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

function activate() {
  const command = workspace.getConfiguration("tilewright").get("command", "tilewright");
  client = new LanguageClient(
    "tilewright",
    "Tilewright",
    { command, args: ["lsp"] },
    { documentSelector: [{ language: "zyn" }, { language: "python" }] },
  );
  return client.start().catch((error) => window.showErrorMessage(`tilewright lsp did not start: ${error.message}`));
}

function deactivate() {
  return client ? client.stop() : undefined;
}

module.exports = { activate, deactivate };
