# `make install`: the command, the trainer, the libraries, the headers and a CMake package, in the
# components core (no torch), torch, testing (for the tests of programs; no torch) and testing-torch
# (its headers that need torch). The installed tree may be moved: no file in it contains a path of
# the source tree or of the build folder. The headers are what <cadre/core.h> and <cadre/cadre.h>
# include, directly or not: the topic headers of include/cadre, their parts, and what these need;
# and for tests in the same way what <cadre/testing.h> and <cadre/testing_groups.h> include. The
# check for C++20 is inserted into each installed header, in place of the empty line after its
# #pragma once, because a program may include any of them first.
include(CMakePackageConfigHelpers)

set(cadre_cmake_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Cadre)

# cadre_install_headers(COMPONENT header...): installs the headers as part of the component.
function(cadre_install_headers component)
  foreach(header IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${header})
    string(REGEX REPLACE "^include/" "" included ${header})
    set(installed ${CMAKE_BINARY_DIR}/installed_headers/${included})
    file(READ ${CMAKE_SOURCE_DIR}/${header} text)
    string(REPLACE "#pragma once\n\n" "#pragma once\n#include \"cadre/core/base/cxx20.h\"\n" text "${text}")
    file(WRITE ${installed} "${text}")
    get_filename_component(folder ${included} DIRECTORY)
    install(FILES ${installed} COMPONENT ${component}
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
  endforeach()
endfunction()

# Before version 1.0 a new minor version may change the binary interface and the source interface
# (CHANGELOG.md).
set(cadre_soversion ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(cadre_soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

# The component core, which does not need torch.
set_target_properties(cadre_core PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${cadre_soversion})
set(core_headers "")
cadre_reachable_headers(cadre/core.h core_headers)
cadre_install_headers(core ${core_headers})
install(FILES cadre/core/base/cxx20.h COMPONENT core DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cadre/core/base)
install(TARGETS cadre_core EXPORT CadreCoreTargets COMPONENT core
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT CadreCoreTargets NAMESPACE Cadre:: COMPONENT core DESTINATION ${cadre_cmake_folder})
install(TARGETS cadre_command COMPONENT core RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES LICENSE COMPONENT core DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(PROGRAMS tools/timeline_svg.py COMPONENT core DESTINATION ${CMAKE_INSTALL_DATADIR}/cadre)

# The component for the tests of programs. It does not need GoogleTest.
set_target_properties(cadre_testing PROPERTIES INSTALL_RPATH "$ORIGIN" VERSION ${PROJECT_VERSION}
                                               SOVERSION ${cadre_soversion})
set(testing_headers ${core_headers})
cadre_reachable_headers(cadre/testing.h testing_headers)
list(REMOVE_ITEM testing_headers ${core_headers})
cadre_install_headers(testing ${testing_headers})
install(TARGETS cadre_testing EXPORT CadreTestingTargets COMPONENT testing
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT CadreTestingTargets NAMESPACE Cadre:: COMPONENT testing DESTINATION ${cadre_cmake_folder})

# The component that needs libtorch. libtorch itself is not installed; Cadre's libraries are found
# relative to the program.
if(TARGET cadre)
  set(torch_headers ${core_headers})
  cadre_reachable_headers(cadre/cadre.h torch_headers)
  list(REMOVE_ITEM torch_headers ${core_headers})
  cadre_install_headers(torch ${torch_headers})
  set(testing_torch_headers ${core_headers} ${torch_headers} ${testing_headers})
  cadre_reachable_headers(cadre/testing_groups.h testing_torch_headers)
  list(REMOVE_ITEM testing_torch_headers ${core_headers} ${torch_headers} ${testing_headers})
  cadre_install_headers(testing-torch ${testing_torch_headers})
  if(cadre_installed_torch)
    set(torch_rpath ";${cadre_installed_torch}/lib")
  endif()
  set_target_properties(cadre PROPERTIES INSTALL_RPATH "$ORIGIN${torch_rpath}"
                                         VERSION ${PROJECT_VERSION} SOVERSION ${cadre_soversion})
  install(TARGETS cadre EXPORT CadreTorchTargets COMPONENT torch
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT CadreTorchTargets NAMESPACE Cadre:: COMPONENT torch
          DESTINATION ${cadre_cmake_folder})
  install(FILES ${CMAKE_SOURCE_DIR}/cmake/FindLibTorch.cmake COMPONENT torch
          DESTINATION ${cadre_cmake_folder})
endif()
if(TARGET cadre_train)
  set_target_properties(
    cadre_train PROPERTIES INSTALL_RPATH "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR}${torch_rpath}")
  install(TARGETS cadre_train COMPONENT torch RUNTIME DESTINATION libexec/cadre)
  file(GLOB example_configurations CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/examples/*.toml)
  install(FILES ${example_configurations} COMPONENT torch
          DESTINATION ${CMAKE_INSTALL_DATADIR}/cadre/examples)
endif()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" cadre_torch_minor "${LibTorch_VERSION}")
configure_package_config_file(
  ${CMAKE_SOURCE_DIR}/cmake/CadreConfig.cmake.in ${CMAKE_BINARY_DIR}/CadreConfig.cmake
  INSTALL_DESTINATION ${cadre_cmake_folder})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/CadreConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/CadreConfig.cmake ${CMAKE_BINARY_DIR}/CadreConfigVersion.cmake
        COMPONENT core DESTINATION ${cadre_cmake_folder})

if(TARGET cadre AND NOT cadre_installed_torch)
  # Installed files do not name a torch inside the source tree, because that tree may be removed.
  install(CODE "message(STATUS \"torch lies in the source tree, so what is installed does not know it: set CADRE_TORCH=${LibTorch_DIR} for projects that use Cadre and for cadre train, or use another torch of that version\")"
          COMPONENT torch)
endif()
