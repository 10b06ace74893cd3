# Libraries every part may use: header-only or static, so that what we ship is self-contained.
find_package(fmt REQUIRED)
get_target_property(_fmt_static fmt::fmt TYPE)
if(TARGET fmt::fmt-header-only)
  # Debian's libfmt is shared; header-only keeps our shared objects free of it.
  set_property(TARGET fmt::fmt-header-only APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
endif()
find_package(Boost 1.74 REQUIRED)
find_package(Threads REQUIRED)
