#pragma once

#include <string>

// Why the last launch of this host thread failed: launch() writes it, the binding throws it.
inline thread_local std::string launch_error;
